"""Small tools for several rooms, which do not depend on training."""
