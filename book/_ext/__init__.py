"""What the book adds to Sphinx, a module a subject; conf.py loads each as an extension."""
