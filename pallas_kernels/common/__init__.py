"""What all ops share: dispatch, device facts, packed rows, codes, and the shapes that evidence is made for."""
