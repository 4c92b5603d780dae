"""The bundled models, one directory each, and the script that trained them."""
