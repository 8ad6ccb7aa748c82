"""The search behind the interfaces of other libraries."""
