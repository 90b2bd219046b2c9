"""What clients notice while nodes of a NATS cluster, processes of Tideway, or both die, hang and come back: streams, short
requests and a batch on the real system, with each JetStream stream in three copies (or one, on a single server).

    python -m bench.cluster_faults [ROW ...] [--streams 6] [--tokens 300] [--lines 200]

`faults` has the rows, `load` the clients. Without any row, all of them are run. Each prints a line: streams and how many
broke, texts that differ from those of a quiet run, answers to short requests by status and code, lines of the batch that
were answered once, the longest silence of a stream, and what the fault's own requests found.
"""
