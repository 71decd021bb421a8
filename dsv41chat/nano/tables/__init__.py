"""Tables written for the embedded model: commands, units, small talk, scope, wordings, names and the block-list."""
