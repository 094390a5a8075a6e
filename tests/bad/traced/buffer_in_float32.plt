import "../base/own.plt"

model {
  network = python("chains:Shifted") #! E0802
}

data {
  source = digits()
}

devices {
  cpus = 2
}

train {
  precision = bf16(level = O2)
}
