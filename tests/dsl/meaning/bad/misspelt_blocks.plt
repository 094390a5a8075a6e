modle { #! E0106
  network = [flatten(), linear(10)]
  loss    = cross_entropy()
}

dataset { #! E0106
  source     = digits()
  batch_size = 64 #! E0107
}

trainer { #! E0106
  max_steps     = 5 #! E0107
  learning_rate = 0.1 #! E0107
}

devises { #! E0106
  cpus = 0 #! E0125
}

expct { #! E0106
  devices == 1
}
