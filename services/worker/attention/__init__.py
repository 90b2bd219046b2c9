"""Attention back ends and the choice among them."""
