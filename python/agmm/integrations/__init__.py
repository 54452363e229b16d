"""agmm inside other libraries."""
