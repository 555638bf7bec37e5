"""The search: propose, launch, record."""
