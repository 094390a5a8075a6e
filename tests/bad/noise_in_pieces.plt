import "base/digits.plt"

model {
  network = [flatten(), dropout(0.1), linear(10)] #! W0608
}

devices {
  cpus = 1
}

parallelism {
  microbatches = 2
}

train {
  dropout_generator = torch
}
