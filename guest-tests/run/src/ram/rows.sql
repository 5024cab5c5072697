CREATE TABLE articles(id INTEGER PRIMARY KEY, name TEXT, price REAL, code TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000)
INSERT INTO articles SELECT i, printf('article %d of %d', i, i % 977), round(i * 7919 % 10007 / 17.0, 2),
    printf('%012x', i * 2654435761 % 281474976710597) FROM n;
CREATE INDEX articles_by_name ON articles(name);
SELECT 'ready';
