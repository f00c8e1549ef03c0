"""Number formats of the caches: small float codes (`minifloat`) and packed rows (`formats`)."""
