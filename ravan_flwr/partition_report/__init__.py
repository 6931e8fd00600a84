"""Show who has what: how a run deals out its examples among its clients."""
