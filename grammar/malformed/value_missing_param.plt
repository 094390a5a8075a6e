param width =
