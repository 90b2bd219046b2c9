"""A soak that ends at zero: for a set time every kind of request, operations and faults at once, on the real system; then
whatever requests take must be back where it was.

    python -m bench.soak [--seconds 1200] [--clients 8] [--output FOLDER]

`usage` reads what processes hold, and judges it; `traffic` makes requests, `operations` does what operators and crashes do.
"""
