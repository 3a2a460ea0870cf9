"""Small tools that know nothing of training and are used in several rooms."""
