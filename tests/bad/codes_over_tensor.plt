import "base/digits.plt"

model {
  network = [flatten(), linear(512), relu(), linear(512), relu(), linear(10)]
}

train {
  optimizer = adamw(state = 8bit)
}

devices {
  cpus = 2
}

parallelism {
  tensor = 2 #! E0737
}
