# What is missing is there under another name: one mistake, not two.
model {
  network = [flatten(), linear(10)]
  loss    = cross_entropy()
}

data {
  source     = digits()
  batch_size = 64 #! E0107
}

train {
  max_steps = 5 #! E0107
  optimizer = sgd()
}
