"""Where the admin layer's documents are kept: one small interface, one module per store."""
