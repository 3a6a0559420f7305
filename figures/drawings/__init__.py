"""The course's drawings, made by code: ``python figures/drawings`` writes them all."""
