train {
  steps = 100 + \
    200
}
