"""Requests that move: Llumnix's evaluation (OSDI'24, section 6) with four instances, in virtual time."""
