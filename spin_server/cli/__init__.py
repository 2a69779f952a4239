"""The `spin-server` command: one file per subcommand."""
