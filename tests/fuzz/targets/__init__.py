"""One module per target."""
