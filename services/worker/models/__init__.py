"""Model families and their loading."""
