"""The exactness matrix: what serves many, against references that know none of it."""
