import "../base/digits.plt"

model {
  network = [linear(8), relu(), linear(4)]
}
data {
  source = python("entropies:by_folder") #! W0657
}
devices {
  cpus = 2
}
