import "circle_b.plt"
