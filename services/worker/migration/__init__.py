"""Requests move to and from other instances while they run (Llumnix section 4.2)."""
