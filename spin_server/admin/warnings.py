"""What answers warn of, in words that the command line looks for."""

NO_TENANT_LEFT = "no tenant is left: the serving API needs no key"
