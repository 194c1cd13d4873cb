"""Tasks that come with the package: real data, small enough for any machine."""
