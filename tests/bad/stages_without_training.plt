import "base/gpt.plt"

model {
  network = [embedding(256, 32), relu(), relu(), linear(256)]
}

data {
  source = stdlib(context = 32)
}

parallelism {
  pipeline     = 4
  microbatches = 4
  stages       = [1, 1, 1, 1] #! E0432
}
