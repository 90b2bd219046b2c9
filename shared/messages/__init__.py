"""Every message that crosses the bus.

Wire format: msgspec msgpack. Structs on hot paths are `array_like`, so new fields may only be added at their end, with
a default. Token ids travel as packed little-endian int32 (`pack_tokens`, `unpack_tokens`), never as lists.
Clocks are never compared across hosts: times in messages are durations, re-based by the receiver.
"""
