"""The web console: a page of plain HTML, CSS and ES modules that the gateway serves from this package, and what it shows."""
