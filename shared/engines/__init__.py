"""Engines that are not Tideway's own, as the rest of it sees them: what they lack, how a request goes on in one, who
is sent to one, and what one says. Pure."""
