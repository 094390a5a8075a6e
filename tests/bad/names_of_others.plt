import "base/digits.plt"

data {
  batch_size  = 32 #! E0107
  num_workers = 2 #! E0107
}

train {
  max_epochs    = 3 #! E0107
  learning_rate = 0.1 #! E0107
}
