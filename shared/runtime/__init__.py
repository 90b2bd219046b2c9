"""How a process runs: settings, telemetry, TLS, leases, watchdog, tasks in the background.

Called by the hosts of every service. The packages that decide may read settings structs and nothing else of it.
"""
