"""Parts for Tideway that live outside of it: pyproject.toml names them as entry points."""
