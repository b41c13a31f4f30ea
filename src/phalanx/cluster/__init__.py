"""Several machines as one: starts Ray on every node, shows it, stops it, and writes what the machines need."""
