"""Tenants on the serving path: who is asking, and what he may reach."""
