"""The admin API over HTTP: one file per resource."""
