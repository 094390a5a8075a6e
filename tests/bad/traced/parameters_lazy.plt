import "../base/digits.plt"

model {
  network = python("parameters:Net", kind = "lazy") #! E0802
}
