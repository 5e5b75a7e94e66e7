"""From scores that people have, such as CLIP's, to probabilities, a noise rate and a cut."""
