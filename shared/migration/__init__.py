"""Decisions of a migration, without I/O: the protocol at both ends and its estimates (docs/design/migration.md)."""
