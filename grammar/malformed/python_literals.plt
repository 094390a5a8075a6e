train {
  compile       = True
  deterministic = False
  clip          = None
}
