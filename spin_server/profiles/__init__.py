"""Profiles: the arguments of `spin-server serve` for a machine, as data.

Every `*.yaml` here is one that `--profile` knows by name. A profile is what would have been typed
first on the command line; it knows nothing that the command line could not say.
"""
