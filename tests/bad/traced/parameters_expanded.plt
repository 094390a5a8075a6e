import "../base/digits.plt"

model {
  network = python("parameters:Net", kind = "expanded") #! E0802
}
