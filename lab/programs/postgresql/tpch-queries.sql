-- The queries of TPC-H (2.4) with the parameters by which the standard validates them. Where it leaves the order of equal rows
-- open, a key decides, so that every run prints the same.

-- 1: pricing summary
SELECT l_returnflag, l_linestatus, sum(l_quantity), sum(l_extendedprice), sum(l_extendedprice * (1 - l_discount)),
    sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)), avg(l_quantity), avg(l_extendedprice), avg(l_discount), count(*)
FROM lineitem
WHERE l_shipdate <= date '1998-12-01' - 90
GROUP BY 1, 2 ORDER BY 1, 2;

-- 2: supplier of least cost
SELECT s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
FROM part, supplier, partsupp, nation, region
WHERE p_partkey = ps_partkey AND s_suppkey = ps_suppkey AND p_size = 15 AND p_type LIKE '%BRASS' AND s_nationkey = n_nationkey
    AND n_regionkey = r_regionkey AND r_name = 'EUROPE' AND ps_supplycost = (
        SELECT min(ps_supplycost) FROM partsupp, supplier, nation, region
        WHERE p_partkey = ps_partkey AND s_suppkey = ps_suppkey AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey
            AND r_name = 'EUROPE')
ORDER BY s_acctbal DESC, n_name, s_name, p_partkey LIMIT 100;

-- 3: shipping priority
SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority
FROM customer, orders, lineitem
WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey AND o_orderdate < date '1995-03-15'
    AND l_shipdate > date '1995-03-15'
GROUP BY l_orderkey, o_orderdate, o_shippriority
ORDER BY revenue DESC, o_orderdate, l_orderkey LIMIT 10;

-- 4: order priorities
SELECT o_orderpriority, count(*) FROM orders
WHERE o_orderdate >= date '1993-07-01' AND o_orderdate < date '1993-10-01'
    AND EXISTS (SELECT FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_receiptdate)
GROUP BY 1 ORDER BY 1;

-- 5: volume of local suppliers
SELECT n_name, sum(l_extendedprice * (1 - l_discount)) AS revenue
FROM customer, orders, lineitem, supplier, nation, region
WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND l_suppkey = s_suppkey AND c_nationkey = s_nationkey
    AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey AND r_name = 'ASIA' AND o_orderdate >= date '1994-01-01'
    AND o_orderdate < date '1995-01-01'
GROUP BY n_name ORDER BY revenue DESC;

-- 6: change of revenue
SELECT sum(l_extendedprice * l_discount) FROM lineitem
WHERE l_shipdate >= date '1994-01-01' AND l_shipdate < date '1995-01-01' AND l_discount BETWEEN 0.05 AND 0.07 AND l_quantity < 24;

-- 7: volume between nations
SELECT s.n_name, c.n_name, extract(year FROM l_shipdate), sum(l_extendedprice * (1 - l_discount))
FROM supplier, lineitem, orders, customer, nation s, nation c
WHERE s_suppkey = l_suppkey AND o_orderkey = l_orderkey AND c_custkey = o_custkey AND s_nationkey = s.n_nationkey
    AND c_nationkey = c.n_nationkey AND l_shipdate BETWEEN date '1995-01-01' AND date '1996-12-31'
    AND (s.n_name = 'FRANCE' AND c.n_name = 'GERMANY' OR s.n_name = 'GERMANY' AND c.n_name = 'FRANCE')
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;

-- 8: share of a nation
SELECT extract(year FROM o_orderdate) AS year,
    sum(CASE WHEN s.n_name = 'BRAZIL' THEN l_extendedprice * (1 - l_discount) ELSE 0 END) / sum(l_extendedprice * (1 - l_discount))
FROM part, supplier, lineitem, orders, customer, nation c, nation s, region
WHERE p_partkey = l_partkey AND s_suppkey = l_suppkey AND l_orderkey = o_orderkey AND o_custkey = c_custkey
    AND c_nationkey = c.n_nationkey AND c.n_regionkey = r_regionkey AND r_name = 'AMERICA' AND s_nationkey = s.n_nationkey
    AND o_orderdate BETWEEN date '1995-01-01' AND date '1996-12-31' AND p_type = 'ECONOMY ANODIZED STEEL'
GROUP BY 1 ORDER BY 1;

-- 9: profit by kind of part
SELECT n_name, extract(year FROM o_orderdate) AS year,
    sum(l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity)
FROM part, supplier, lineitem, partsupp, orders, nation
WHERE s_suppkey = l_suppkey AND ps_suppkey = l_suppkey AND ps_partkey = l_partkey AND p_partkey = l_partkey
    AND o_orderkey = l_orderkey AND s_nationkey = n_nationkey AND p_name LIKE '%green%'
GROUP BY 1, 2 ORDER BY 1, 2 DESC;

-- 10: returned items
SELECT c_custkey, c_name, sum(l_extendedprice * (1 - l_discount)) AS revenue, c_acctbal, n_name, c_address, c_phone, c_comment
FROM customer, orders, lineitem, nation
WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND o_orderdate >= date '1993-10-01' AND o_orderdate < date '1994-01-01'
    AND l_returnflag = 'R' AND c_nationkey = n_nationkey
GROUP BY c_custkey, n_name ORDER BY revenue DESC, c_custkey LIMIT 20;

-- 11: important stock; the fraction is 0.0001 divided by the scale
SELECT ps_partkey, sum(ps_supplycost * ps_availqty) AS value
FROM partsupp, supplier, nation
WHERE ps_suppkey = s_suppkey AND s_nationkey = n_nationkey AND n_name = 'GERMANY'
GROUP BY ps_partkey
HAVING sum(ps_supplycost * ps_availqty) > (
    SELECT sum(ps_supplycost * ps_availqty) * 0.005 FROM partsupp, supplier, nation
    WHERE ps_suppkey = s_suppkey AND s_nationkey = n_nationkey AND n_name = 'GERMANY')
ORDER BY value DESC, ps_partkey;

-- 12: modes of shipping and priorities
SELECT l_shipmode, count(*) FILTER (WHERE o_orderpriority IN ('1-URGENT', '2-HIGH')),
    count(*) FILTER (WHERE o_orderpriority NOT IN ('1-URGENT', '2-HIGH'))
FROM orders, lineitem
WHERE o_orderkey = l_orderkey AND l_shipmode IN ('MAIL', 'SHIP') AND l_commitdate < l_receiptdate AND l_shipdate < l_commitdate
    AND l_receiptdate >= date '1994-01-01' AND l_receiptdate < date '1995-01-01'
GROUP BY 1 ORDER BY 1;

-- 13: orders of customers
SELECT orders, count(*) AS customers
FROM (
    SELECT c_custkey, count(o_orderkey) AS orders
    FROM customer LEFT JOIN orders ON c_custkey = o_custkey AND o_comment NOT LIKE '%special%requests%'
    GROUP BY 1) AS by_customer
GROUP BY 1 ORDER BY customers DESC, orders DESC;

-- 14: effect of promotion
SELECT 100 * sum(CASE WHEN p_type LIKE 'PROMO%' THEN l_extendedprice * (1 - l_discount) ELSE 0 END)
    / sum(l_extendedprice * (1 - l_discount))
FROM lineitem, part
WHERE l_partkey = p_partkey AND l_shipdate >= date '1995-09-01' AND l_shipdate < date '1995-10-01';

-- 15: top supplier
WITH revenue AS (
    SELECT l_suppkey, sum(l_extendedprice * (1 - l_discount)) AS total FROM lineitem
    WHERE l_shipdate >= date '1996-01-01' AND l_shipdate < date '1996-04-01'
    GROUP BY 1)
SELECT s_suppkey, s_name, s_address, s_phone, total FROM supplier, revenue
WHERE s_suppkey = l_suppkey AND total = (SELECT max(total) FROM revenue)
ORDER BY 1;

-- 16: suppliers of parts
SELECT p_brand, p_type, p_size, count(DISTINCT ps_suppkey) AS suppliers FROM partsupp, part
WHERE p_partkey = ps_partkey AND p_brand <> 'Brand#45' AND p_type NOT LIKE 'MEDIUM POLISHED%'
    AND p_size IN (49, 14, 23, 45, 19, 3, 36, 9)
    AND ps_suppkey NOT IN (SELECT s_suppkey FROM supplier WHERE s_comment LIKE '%Customer%Complaints%')
GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3;

-- 17: revenue of small orders
SELECT sum(l_extendedprice) / 7.0 FROM lineitem, part
WHERE p_partkey = l_partkey AND p_brand = 'Brand#23' AND p_container = 'MED BOX'
    AND l_quantity < (SELECT 0.2 * avg(l_quantity) FROM lineitem WHERE l_partkey = p_partkey);

-- 18: customers of large orders
SELECT c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) FROM customer, orders, lineitem
WHERE o_orderkey IN (SELECT l_orderkey FROM lineitem GROUP BY 1 HAVING sum(l_quantity) > 300) AND c_custkey = o_custkey
    AND o_orderkey = l_orderkey
GROUP BY c_custkey, o_orderkey ORDER BY o_totalprice DESC, o_orderdate, o_orderkey LIMIT 100;

-- 19: discounted revenue
SELECT sum(l_extendedprice * (1 - l_discount)) FROM lineitem, part
WHERE p_partkey = l_partkey AND l_shipmode IN ('AIR', 'AIR REG') AND l_shipinstruct = 'DELIVER IN PERSON' AND (
    p_brand = 'Brand#12' AND p_container IN ('SM CASE', 'SM BOX', 'SM PACK', 'SM PKG') AND l_quantity BETWEEN 1 AND 11
        AND p_size BETWEEN 1 AND 5
    OR p_brand = 'Brand#23' AND p_container IN ('MED BAG', 'MED BOX', 'MED PKG', 'MED PACK') AND l_quantity BETWEEN 10 AND 20
        AND p_size BETWEEN 1 AND 10
    OR p_brand = 'Brand#34' AND p_container IN ('LG CASE', 'LG BOX', 'LG PACK', 'LG PKG') AND l_quantity BETWEEN 20 AND 30
        AND p_size BETWEEN 1 AND 15);

-- 20: parts for promotion
SELECT s_name, s_address FROM supplier, nation
WHERE s_suppkey IN (
        SELECT ps_suppkey FROM partsupp
        WHERE ps_partkey IN (SELECT p_partkey FROM part WHERE p_name LIKE 'forest%')
            AND ps_availqty > (
                SELECT 0.5 * sum(l_quantity) FROM lineitem
                WHERE l_partkey = ps_partkey AND l_suppkey = ps_suppkey AND l_shipdate >= date '1994-01-01'
                    AND l_shipdate < date '1995-01-01'))
    AND s_nationkey = n_nationkey AND n_name = 'CANADA'
ORDER BY s_name;

-- 21: suppliers who kept orders waiting
SELECT s_name, count(*) FROM supplier, lineitem late, orders, nation
WHERE s_suppkey = late.l_suppkey AND o_orderkey = late.l_orderkey AND o_orderstatus = 'F' AND late.l_receiptdate > late.l_commitdate
    AND EXISTS (SELECT FROM lineitem other WHERE other.l_orderkey = late.l_orderkey AND other.l_suppkey <> late.l_suppkey)
    AND NOT EXISTS (
        SELECT FROM lineitem other
        WHERE other.l_orderkey = late.l_orderkey AND other.l_suppkey <> late.l_suppkey AND other.l_receiptdate > other.l_commitdate)
    AND s_nationkey = n_nationkey AND n_name = 'SAUDI ARABIA'
GROUP BY s_name ORDER BY 2 DESC, s_name LIMIT 100;

-- 22: opportunity of sales
SELECT substring(c_phone, 1, 2), count(*), sum(c_acctbal) FROM customer
WHERE substring(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17')
    AND c_acctbal > (
        SELECT avg(c_acctbal) FROM customer
        WHERE c_acctbal > 0 AND substring(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17'))
    AND NOT EXISTS (SELECT FROM orders WHERE o_custkey = c_custkey)
GROUP BY 1 ORDER BY 1;
