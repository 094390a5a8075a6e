import "../base/digits.plt"

model {
  network = python("parameters:Net", kind = "int16") #! E0675
}

devices {
  cpus = 2
}
