"""Mathematics: the forward passes. A model owns its weights and nothing that changes."""
