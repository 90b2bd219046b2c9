"""Every message that crosses the bus.

Wire format: msgspec msgpack. Structs on hot paths are `array_like`, so new fields may only be added at their end, with
a default: in a rolling upgrade a message of another version lacks fields or has some more, and means the same. Bytes that
another version would misread, such as KV in another layout, are kept from it by a field of another type: it refuses the
message, and the request stays where it is, or is computed again if its instance goes. Token ids travel as packed
little-endian int32 (`pack_tokens`, `unpack_tokens`), never as lists.
Clocks are never compared across hosts: times in messages are durations, re-based by the receiver.
"""
