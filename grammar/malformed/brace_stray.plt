data {
  batch = 64
}
}

memory {
  recompute = full
}
