"""Studies: named, seeded comparisons of models that differ in one thing. `registry` names them."""
