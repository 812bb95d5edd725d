"""`trm tune`: search for a better recipe by training candidates for the same time each."""
